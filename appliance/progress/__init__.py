"""Progress of long tasks: lines, stages, jobs, events of quantizing."""
