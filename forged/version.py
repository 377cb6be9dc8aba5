"""The version of forged."""

VERSION = "0.1.0"
