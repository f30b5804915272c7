"""Backends answer requests. The batch runner and the server only know their interface, `base`."""
