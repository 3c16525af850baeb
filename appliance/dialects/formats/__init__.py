"""The forms of a call, one file each."""
