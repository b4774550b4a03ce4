"""The experiments of Paige & Wood (2016), sec. 5, against exact answers."""
