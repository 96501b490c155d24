"""TransformerEngine's real Python package on a machine without a GPU.

A torch emulation stands in for the compiled extension ``transformer_engine_torch``; everything in
Python is the library's own. Only in a process of its own: ``install()`` patches torch.
"""
