"""Training: samples packed into forests, reinforcement-learning algorithms, and Megatron-Core to run them."""
