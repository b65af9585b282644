"""OpenAI's client, with the token ids, log-probabilities and weights versions that RL needs."""
