"""What each step does, and for whom. See scheduler, and policy for the rules."""
