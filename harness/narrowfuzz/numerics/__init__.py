"""Formats, scale rules, recipe plans, the float64 reference and the proven bounds.

Numpy only: nothing here may import torch, so that a reference can never share a bug with the
library it judges.
"""
