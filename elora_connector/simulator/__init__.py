"""Trace replay on a virtual clock, with the policy code that the connector ships."""
