"""Where the assistant runs: in the caller's thread, or in a process of its own."""
