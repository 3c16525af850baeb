"""Measure the CPU library beside torch and the memory's bandwidth."""
