"""What a process does by itself: timers, schedules, dispatches, workers. See ARCHITECTURE.md."""
