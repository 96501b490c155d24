"""Models under test: plain torch modules, small enough that their source goes into a script."""
