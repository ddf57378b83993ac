"""KV representations, one file each. A file exports `STORAGE`: a `StorageType` (see `sparsejax.registry`)."""
