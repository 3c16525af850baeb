"""Widens codes whose bits lie in planes, and codes that name values."""
