"""Meta-learning: learned policy gradient (LPG), and agents trained by a learned update rule."""
