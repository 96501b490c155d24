"""What must hold of every case: `pytest properties/` in a checkout, `pytest --pyargs
narrowfuzz.properties` of an installed package."""
