"""The CPU library beside torch and the speed of the memory."""
