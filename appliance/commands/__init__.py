"""One file per command; each imports what it needs when it runs, so that help stays quick."""
