"""What is watched while a run trains: findings, and what is done about them."""
