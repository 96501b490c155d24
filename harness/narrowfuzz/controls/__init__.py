"""Clean subjects: what is numerically right, or legally different, and must raise no finding."""
