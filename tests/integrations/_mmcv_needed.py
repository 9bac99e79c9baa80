"""Importing this skips the importing module where mmcv is absent; it sorts before mmcv itself."""

from _frameworks import framework

framework("mmcv")
