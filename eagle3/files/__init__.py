"""File formats that the stages share: JSONL records, safetensors, spools that bound memory, content hashes."""
