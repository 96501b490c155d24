"""The models that are trained, by name, and the library layers that count as models."""
