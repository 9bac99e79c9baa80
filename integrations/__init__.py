"""Patches for the frameworks truncdet knows; none is imported until it is asked for."""
