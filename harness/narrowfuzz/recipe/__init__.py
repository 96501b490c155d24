"""What is under test: recipes, their plans and capabilities, and how their files are loaded."""
