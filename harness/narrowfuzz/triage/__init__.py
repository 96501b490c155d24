"""Turns a bad verdict into a report for a maintainer: minimal case, script, verification."""
