"""The commands, a file each; they import heavy modules only when run, which keeps help fast."""
