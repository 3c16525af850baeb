"""Tests the ways between ranks before a step depends on one, and chooses among them."""
