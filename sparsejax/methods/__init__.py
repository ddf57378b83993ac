"""Sparse methods, one file each. A file exports `METHOD`: a `MethodType` (see `sparsejax.registry`)."""
