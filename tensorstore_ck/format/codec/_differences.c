/* Differences sorted by the exponents of their base (see delta.py, which says the same in numpy).

   A counting sort: one pass counts the exponents, another one writes each difference to its place, or takes it from there. The words are cut
   into parts that are worked on in turns, each with places of its own: neighbours often have the same exponent, and the next place of an
   exponent waits for the one before. */

#include "_kernel.h"

#define PARTS 4

#define WORD(BITS)                                                                                                                         \
    static inline unsigned exponent##BITS(uint##BITS##_t word)                                                                             \
    {                                                                                                                                      \
        return (unsigned)((uint##BITS##_t)(word << 1) >> (BITS - 8));                                                                      \
    }                                                                                                                                      \
                                                                                                                                           \
    /* Floats as integers in their order, in two's complement; its own inverse. */                                                         \
    static inline uint##BITS##_t ordered##BITS(uint##BITS##_t word)                                                                        \
    {                                                                                                                                      \
        uint##BITS##_t sign = (uint##BITS##_t)(0 - (word >> (BITS - 1)));                                                                  \
        return word ^ (uint##BITS##_t)(sign >> 1);                                                                                         \
    }                                                                                                                                      \
                                                                                                                                           \
    HOT static void find_places##BITS(const char *base, size_t count, uint32_t places[PARTS][256])                                         \
    {                                                                                                                                      \
        size_t part = count / PARTS;                                                                                                       \
        memset(places, 0, PARTS * sizeof *places);                                                                                         \
        for (size_t i = 0; i < part; i++)                                                                                                  \
            for (size_t p = 0; p < PARTS; p++)                                                                                             \
                places[p][exponent##BITS(load##BITS(base, p * part + i))]++;                                                               \
        for (size_t i = PARTS * part; i < count; i++)                                                                                      \
            places[PARTS - 1][exponent##BITS(load##BITS(base, i))]++;                                                                      \
        uint32_t place = 0;                                                                                                                \
        for (int e = 0; e < 256; e++)                                                                                                      \
            for (int p = 0; p < PARTS; p++) {                                                                                              \
                uint32_t here = places[p][e];                                                                                              \
                places[p][e] = place;                                                                                                      \
                place += here;                                                                                                             \
            }                                                                                                                              \
    }                                                                                                                                      \
                                                                                                                                           \
    static inline void take##BITS(const char *words, const char *base, char *into, size_t i, uint32_t places[256])                         \
    {                                                                                                                                      \
        uint##BITS##_t other = load##BITS(base, i);                                                                                        \
        uint##BITS##_t difference = (uint##BITS##_t)(ordered##BITS(load##BITS(words, i)) - ordered##BITS(other));                          \
        uint##BITS##_t sign = (uint##BITS##_t)(0 - (difference >> (BITS - 1)));                                                            \
        store##BITS(into, places[exponent##BITS(other)]++, (uint##BITS##_t)(difference << 1) ^ sign);                                      \
    }                                                                                                                                      \
                                                                                                                                           \
    static inline void add##BITS(const char *sorted, const char *base, char *into, size_t i, uint32_t places[256])                         \
    {                                                                                                                                      \
        uint##BITS##_t other = load##BITS(base, i), zigzag = load##BITS(sorted, places[exponent##BITS(other)]++);                          \
        uint##BITS##_t difference = (uint##BITS##_t)((zigzag >> 1) ^ (uint##BITS##_t)(0 - (zigzag & 1)));                                  \
        store##BITS(into, i, ordered##BITS((uint##BITS##_t)(ordered##BITS(other) + difference)));                                          \
    }                                                                                                                                      \
                                                                                                                                           \
    HOT static void take_all##BITS(const char *words, const char *base, char *into, size_t count)                                          \
    {                                                                                                                                      \
        uint32_t places[PARTS][256];                                                                                                       \
        size_t part = count / PARTS;                                                                                                       \
        find_places##BITS(base, count, places);                                                                                            \
        for (size_t i = 0; i < part; i++)                                                                                                  \
            for (size_t p = 0; p < PARTS; p++)                                                                                             \
                take##BITS(words, base, into, p * part + i, places[p]);                                                                    \
        for (size_t i = PARTS * part; i < count; i++)                                                                                      \
            take##BITS(words, base, into, i, places[PARTS - 1]);                                                                           \
    }                                                                                                                                      \
                                                                                                                                           \
    HOT static void add_all##BITS(const char *sorted, const char *base, char *into, size_t count)                                          \
    {                                                                                                                                      \
        uint32_t places[PARTS][256];                                                                                                       \
        size_t part = count / PARTS;                                                                                                       \
        find_places##BITS(base, count, places);                                                                                            \
        for (size_t i = 0; i < part; i++)                                                                                                  \
            for (size_t p = 0; p < PARTS; p++)                                                                                             \
                add##BITS(sorted, base, into, p * part + i, places[p]);                                                                    \
        for (size_t i = PARTS * part; i < count; i++)                                                                                      \
            add##BITS(sorted, base, into, i, places[PARTS - 1]);                                                                           \
    }

WORD(8)
WORD(16)
WORD(32)
WORD(64)

const DifferenceLoop take_loops[4] = {take_all8, take_all16, take_all32, take_all64};
const DifferenceLoop add_loops[4] = {add_all8, add_all16, add_all32, add_all64};
