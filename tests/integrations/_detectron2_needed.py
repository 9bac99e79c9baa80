"""Imported before detectron2: its absence skips the module, or fails where it is promised."""

from _frameworks import framework

framework("detectron2")
