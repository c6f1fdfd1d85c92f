"""Where noise and forks go while sampling: every public function is a plan."""
