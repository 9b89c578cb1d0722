"""Operations whose best form depends on the platform."""
