"""How the values of several rewards are transformed and become one."""
