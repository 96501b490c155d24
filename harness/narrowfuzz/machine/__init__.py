"""The machine that results depend on besides the code: CPU, GPU, installed packages, compiler."""
