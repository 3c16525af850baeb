"""Misbehaving suites for the tests of the benchmark's supervisor."""
