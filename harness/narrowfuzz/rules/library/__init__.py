"""Rules of a library's own layers."""
