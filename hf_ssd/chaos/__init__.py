"""Things going wrong on purpose: random faults at random steps of calls on tiny models."""
