"""What results depend on besides the code: CPU, GPU, installed packages and compiler."""
