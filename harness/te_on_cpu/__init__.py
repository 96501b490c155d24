"""TransformerEngine's real Python package on a machine without a GPU.

A torch emulation replaces the compiled extension ``transformer_engine_torch``; all Python code is
the library's own. ``install()`` patches torch, so it needs a process of its own.
"""
