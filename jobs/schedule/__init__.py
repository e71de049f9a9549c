"""Schedules: which job runs when (schedules), the process that starts it (scheduler), what ran (history)."""
