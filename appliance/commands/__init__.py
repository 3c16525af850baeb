"""The commands, a file each; they import heavy modules only when run, so that help is fast."""
