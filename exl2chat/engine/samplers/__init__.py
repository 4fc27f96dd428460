"""The steps of the sampler, each a small function of the candidates, and what they remember of a conversation."""
