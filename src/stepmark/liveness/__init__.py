"""Who is alive, and what takes too long: clocks, deadlines, heartbeats, watchdogs, and how a process ends."""
