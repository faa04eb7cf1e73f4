"""Where the assistant runs: in a process of its own, in a thread of its own, or in the caller's thread."""
