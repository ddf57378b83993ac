"""Attention and selection over paged KV. `api` is the door: one public function per operation."""
