/* Differences sorted by the exponents of their base (see delta.py, which says the same in numpy, 6 times slower).

   A counting sort: one pass counts the exponents, another one writes each difference to its place, or takes it from there. A place waits
   for the one before, so the second pass goes from both ends of the words inward. What is not about places is done with vectors, in pieces
   that stay in the nearest cache. */

#include "_kernel.h"

#define TURNS 8
#define PIECE ((size_t)1024) /* words */

typedef struct {
    uint32_t first, second, last, previous;
} Places;

/* Of the next two words from the front, by their exponents, and of the next two from the back, which lie the other way round. */
INLINE Places places_of(uint32_t at[256], uint32_t ends[256], const uint8_t front[2], const uint8_t back[2])
{
    /* Two at a time: a place is read after the one before was written. */
    Places places = {at[front[0]], at[front[1]] + (front[0] == front[1]), ends[back[1]] - 1, ends[back[0]] - 1 - (back[0] == back[1])};
    at[front[0]] = places.first + 1;
    at[front[1]] = places.second + 1;
    ends[back[1]] = places.last;
    ends[back[0]] = places.previous;
    return places;
}

#define WORD(BITS)                                                                                                                         \
    INLINE unsigned exponent##BITS(uint##BITS##_t word)                                                                                    \
    {                                                                                                                                      \
        return (unsigned)((uint##BITS##_t)(word << 1) >> (BITS - 8));                                                                      \
    }                                                                                                                                      \
                                                                                                                                           \
    /* Floats as integers in their order, in two's complement; its own inverse. */                                                         \
    INLINE uint##BITS##_t ordered##BITS(uint##BITS##_t word)                                                                               \
    {                                                                                                                                      \
        uint##BITS##_t sign = (uint##BITS##_t)(0 - (word >> (BITS - 1)));                                                                  \
        return word ^ (uint##BITS##_t)(sign >> 1);                                                                                         \
    }                                                                                                                                      \
                                                                                                                                           \
    INLINE uint##BITS##_t zigzag##BITS(uint##BITS##_t word, uint##BITS##_t base)                                                           \
    {                                                                                                                                      \
        uint##BITS##_t difference = (uint##BITS##_t)(ordered##BITS(word) - ordered##BITS(base));                                           \
        return (uint##BITS##_t)(difference << 1) ^ (uint##BITS##_t)(0 - (difference >> (BITS - 1)));                                       \
    }                                                                                                                                      \
                                                                                                                                           \
    INLINE uint##BITS##_t plus##BITS(uint##BITS##_t base, uint##BITS##_t zigzag)                                                           \
    {                                                                                                                                      \
        uint##BITS##_t difference = (uint##BITS##_t)((zigzag >> 1) ^ (uint##BITS##_t)(0 - (zigzag & 1)));                                  \
        return ordered##BITS((uint##BITS##_t)(ordered##BITS(base) + difference));                                                          \
    }                                                                                                                                      \
                                                                                                                                           \
    /* Where the words of each exponent begin and end. */                                                                                  \
    static void starts##BITS(const char *base, size_t count, uint32_t starts[256], uint32_t ends[256])                                     \
    {                                                                                                                                      \
        uint32_t counts[TURNS][256]; /* several, as neighbours are often alike, and a count waits for the one before */                    \
        size_t i = 0;                                                                                                                      \
        memset(counts, 0, sizeof counts);                                                                                                  \
        for (; i + TURNS <= count; i += TURNS)                                                                                             \
            for (size_t turn = 0; turn < TURNS; turn++)                                                                                    \
                counts[turn][exponent##BITS(load##BITS(base, i + turn))]++;                                                                \
        for (; i < count; i++)                                                                                                             \
            counts[0][exponent##BITS(load##BITS(base, i))]++;                                                                              \
        for (uint32_t e = 0, start = 0; e < 256; e++) {                                                                                    \
            starts[e] = start;                                                                                                             \
            for (size_t turn = 0; turn < TURNS; turn++)                                                                                    \
                start += counts[turn][e];                                                                                                  \
            ends[e] = start;                                                                                                               \
        }                                                                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    HOT static void exponents##BITS(const char *restrict base, uint8_t *restrict to)                                                       \
    {                                                                                                                                      \
        for (size_t i = 0; i < PIECE; i++)                                                                                                 \
            to[i] = (uint8_t)exponent##BITS(load##BITS(base, i));                                                                          \
    }                                                                                                                                      \
                                                                                                                                           \
    HOT static void zigzags##BITS(const char *restrict words, const char *restrict base, char *restrict to)                                \
    {                                                                                                                                      \
        for (size_t i = 0; i < PIECE; i++)                                                                                                 \
            store##BITS(to, i, zigzag##BITS(load##BITS(words, i), load##BITS(base, i)));                                                   \
    }                                                                                                                                      \
                                                                                                                                           \
    /* `to` may be `base`. */                                                                                                              \
    HOT static void add_to##BITS(const char *differences, const char *base, char *to)                                                      \
    {                                                                                                                                      \
        INDEPENDENT                                                                                                                        \
        for (size_t i = 0; i < PIECE; i++)                                                                                                 \
            store##BITS(to, i, plus##BITS(load##BITS(base, i), load##BITS(differences, i)));                                               \
    }                                                                                                                                      \
                                                                                                                                           \
    static void take##BITS(const char *words, const char *base, char *into, size_t count)                                                  \
    {                                                                                                                                      \
        uint32_t at[256], ends[256];                                                                                                       \
        uint8_t head[PIECE], tail[PIECE];                                                                                                  \
        char early[PIECE * sizeof(uint##BITS##_t)], late[PIECE * sizeof(uint##BITS##_t)];                                                  \
        size_t i = 0, left = count;                                                                                                        \
        starts##BITS(base, count, at, ends);                                                                                               \
        for (; left - i >= 2 * PIECE; i += PIECE) {                                                                                        \
            left -= PIECE;                                                                                                                 \
            exponents##BITS(base + i * sizeof(uint##BITS##_t), head);                                                                      \
            exponents##BITS(base + left * sizeof(uint##BITS##_t), tail);                                                                   \
            zigzags##BITS(words + i * sizeof(uint##BITS##_t), base + i * sizeof(uint##BITS##_t), early);                                   \
            zigzags##BITS(words + left * sizeof(uint##BITS##_t), base + left * sizeof(uint##BITS##_t), late);                              \
            for (size_t number = 0; number < PIECE; number += 2) {                                                                         \
                Places places = places_of(at, ends, head + number, tail + PIECE - 2 - number);                                             \
                store##BITS(into, places.first, load##BITS(early, number));                                                                \
                store##BITS(into, places.second, load##BITS(early, number + 1));                                                           \
                store##BITS(into, places.last, load##BITS(late, PIECE - 1 - number));                                                      \
                store##BITS(into, places.previous, load##BITS(late, PIECE - 2 - number));                                                  \
            }                                                                                                                              \
        }                                                                                                                                  \
        for (; i < left; i++) {                                                                                                            \
            uint##BITS##_t other = load##BITS(base, i);                                                                                    \
            store##BITS(into, at[exponent##BITS(other)]++, zigzag##BITS(load##BITS(words, i), other));                                     \
        }                                                                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    static void add##BITS(const char *sorted, const char *base, char *into, size_t count)                                                  \
    {                                                                                                                                      \
        uint32_t at[256], ends[256];                                                                                                       \
        uint8_t head[PIECE], tail[PIECE];                                                                                                  \
        char early[PIECE * sizeof(uint##BITS##_t)], late[PIECE * sizeof(uint##BITS##_t)];                                                  \
        size_t i = 0, left = count;                                                                                                        \
        starts##BITS(base, count, at, ends);                                                                                               \
        for (; left - i >= 2 * PIECE; i += PIECE) {                                                                                        \
            left -= PIECE;                                                                                                                 \
            exponents##BITS(base + i * sizeof(uint##BITS##_t), head);                                                                      \
            exponents##BITS(base + left * sizeof(uint##BITS##_t), tail);                                                                   \
            for (size_t number = 0; number < PIECE; number += 2) {                                                                         \
                Places places = places_of(at, ends, head + number, tail + PIECE - 2 - number);                                             \
                store##BITS(early, number, load##BITS(sorted, places.first));                                                              \
                store##BITS(early, number + 1, load##BITS(sorted, places.second));                                                         \
                store##BITS(late, PIECE - 1 - number, load##BITS(sorted, places.last));                                                    \
                store##BITS(late, PIECE - 2 - number, load##BITS(sorted, places.previous));                                                \
            }                                                                                                                              \
            add_to##BITS(early, base + i * sizeof(uint##BITS##_t), into + i * sizeof(uint##BITS##_t));                                     \
            add_to##BITS(late, base + left * sizeof(uint##BITS##_t), into + left * sizeof(uint##BITS##_t));                                \
        }                                                                                                                                  \
        for (; i < left; i++) {                                                                                                            \
            uint##BITS##_t other = load##BITS(base, i);                                                                                    \
            store##BITS(into, i, plus##BITS(other, load##BITS(sorted, at[exponent##BITS(other)]++)));                                      \
        }                                                                                                                                  \
    }

WORD(8)
WORD(16)
WORD(32)
WORD(64)

const DifferenceLoop take_loops[4] = {take8, take16, take32, take64};
const DifferenceLoop add_loops[4] = {add8, add16, add32, add64};
