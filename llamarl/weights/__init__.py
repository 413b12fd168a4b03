"""How new weights get from the trainer into the generators: layouts, copy plans, transports,
fingerprints and the two-phase publish. LlamaRL's paper calls it DDMA."""
