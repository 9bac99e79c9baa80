"""Importing this skips the importing module where mmdet is absent; it sorts before mmdet itself."""

from _frameworks import framework

framework("mmdet")
