"""The ways to drive the decode loop."""
