/* Chooses the Huffman code of a block, and describes it as RFC 8878 does (4.2.1): as weights, which are coded themselves. */

#include "_kernel.h"

#define FSE_LOG 6
#define FSE_STATES (1 << FSE_LOG)
#define WEIGHTS (MAX_BITS + 1)

typedef struct {
    uint64_t bits;
    unsigned count;
    uint8_t *to;
} BitWriter;

static void put_bits(BitWriter *writer, uint64_t value, unsigned count)
{
    writer->bits |= value << writer->count;
    for (writer->count += count; writer->count >= 8; writer->count -= 8, writer->bits >>= 8)
        *writer->to++ = (uint8_t)writer->bits;
}

static uint8_t *end_bits(BitWriter *writer)
{
    if (writer->count)
        *writer->to++ = (uint8_t)writer->bits;
    return writer->to;
}

static unsigned highest_bit(uint32_t value)
{
    unsigned bit = 0;
    while (value >>= 1)
        bit++;
    return bit;
}

/* The symbols that occur, the rarest first: two passes of a radix sort, by 9 bits of a count that has at most 18. */
static size_t sort_symbols(const uint32_t counts[256], uint32_t keys[256])
{
    uint32_t found[256], other[256];
    size_t n = 0;
    for (uint32_t symbol = 0; symbol < 256; symbol++)
        if (counts[symbol])
            found[n++] = counts[symbol] << 8 | symbol;
    for (unsigned pass = 0; pass < 2; pass++) {
        const uint32_t *from = pass ? other : found;
        uint32_t *to = pass ? keys : other, starts[513] = {0};
        unsigned shift = 8 + 9 * pass;
        for (size_t i = 0; i < n; i++)
            starts[(from[i] >> shift & 511) + 1]++;
        for (size_t i = 0; i < 512; i++)
            starts[i + 1] += starts[i];
        for (size_t i = 0; i < n; i++)
            to[starts[from[i] >> shift & 511]++] = from[i];
    }
    return n;
}

/* The bits of each symbol in an optimal code, of a code of at most MAX_BITS that is near it. Moffat and Katajainen, "In-place calculation
   of minimum-redundancy codes" (1995); codes that are too long are shortened at the cost of the next longest. Needs two symbols. */
unsigned choose_lengths(const uint32_t counts[256], uint8_t lengths[256])
{
    uint32_t keys[256], tree[256] = {0}, per_length[MAX_BITS + 1] = {0};
    size_t n = sort_symbols(counts, keys), root = 0, leaf = 2, next;
    for (size_t i = 0; i < n; i++)
        tree[i] = keys[i] >> 8;
    tree[0] += tree[1];
    for (next = 1; next < n - 1; next++) {
        if (leaf >= n || tree[root] < tree[leaf]) {
            tree[next] = tree[root];
            tree[root++] = (uint32_t)next;
        } else
            tree[next] = tree[leaf++];
        if (leaf >= n || (root < next && tree[root] < tree[leaf])) {
            tree[next] += tree[root];
            tree[root++] = (uint32_t)next;
        } else
            tree[next] += tree[leaf++];
    }
    tree[n - 2] = 0;
    for (size_t i = n - 2; i-- > 0;)
        tree[i] = tree[tree[i]] + 1;
    size_t available = 1, used = 0, inner = n - 1;
    for (unsigned depth = 0; available > 0; depth++) {
        while (inner > 0 && tree[inner - 1] == depth) {
            used++;
            inner--;
        }
        per_length[depth > MAX_BITS ? MAX_BITS : depth] += (uint32_t)(available - used);
        available = 2 * used;
        used = 0;
    }
    uint32_t total = 0;
    for (unsigned bits = 1; bits <= MAX_BITS; bits++)
        total += per_length[bits] << (MAX_BITS - bits);
    for (; total > 1u << MAX_BITS; total--) {
        unsigned bits = MAX_BITS - 1;
        while (!per_length[bits])
            bits--;
        per_length[MAX_BITS]--;
        per_length[bits]--;
        per_length[bits + 1] += 2;
    }
    unsigned longest = MAX_BITS, bits = MAX_BITS;
    while (!per_length[longest])
        longest--;
    memset(lengths, 0, 256);
    for (size_t i = 0; i < n; i++) {
        while (!per_length[bits])
            bits--;
        per_length[bits]--;
        lengths[keys[i] & 255] = (uint8_t)bits;
    }
    return longest;
}

/* How many states of FSE's machine each weight gets (RFC 8878, 4.1); 0 if there is one weight only. */
static int share_states(const uint8_t *weights, size_t count, int shares[WEIGHTS])
{
    int counts[WEIGHTS] = {0}, left = FSE_STATES, largest = 0;
    for (size_t i = 0; i < count; i++)
        counts[weights[i]]++;
    for (int w = 0; w < WEIGHTS; w++) {
        shares[w] = counts[w] ? (int)(((size_t)counts[w] * FSE_STATES + count / 2) / count) : 0;
        if (counts[w] && !shares[w])
            shares[w] = 1;
        left -= shares[w];
        if (counts[w] > counts[largest])
            largest = w;
    }
    if ((size_t)counts[largest] == count)
        return 0;
    shares[largest] += left;
    return shares[largest] > 0;
}

static void put_shares(BitWriter *writer, const int shares[WEIGHTS])
{
    int remaining = FSE_STATES + 1, threshold = FSE_STATES, after_zero = 0;
    unsigned bits = FSE_LOG + 1;
    put_bits(writer, FSE_LOG - 5, 4);
    for (int w = 0; w < WEIGHTS && remaining > 1;) {
        if (after_zero) {
            int start = w;
            while (!shares[w])
                w++;
            for (; w >= start + 3; start += 3)
                put_bits(writer, 3, 2);
            put_bits(writer, (uint64_t)(w - start), 2);
        }
        int share = shares[w++], most = 2 * threshold - 1 - remaining;
        remaining -= share;
        after_zero = !share;
        share++;
        if (share >= threshold)
            share += most;
        put_bits(writer, (uint64_t)share, bits - (share < most));
        for (; remaining < threshold; threshold >>= 1)
            bits--;
    }
}

typedef struct {
    uint16_t next[FSE_STATES];
    int first_state[WEIGHTS];
    uint32_t bits[WEIGHTS];
} WeightCoder;

static void make_weight_coder(WeightCoder *coder, const int shares[WEIGHTS])
{
    uint8_t spread[FSE_STATES];
    int starts[WEIGHTS + 1] = {0}, at = 0;
    for (int w = 0; w < WEIGHTS; w++) {
        for (int i = 0; i < shares[w]; i++, at = (at + (FSE_STATES >> 1) + (FSE_STATES >> 3) + 3) & (FSE_STATES - 1))
            spread[at] = (uint8_t)w;
        starts[w + 1] = starts[w] + shares[w];
        unsigned most = FSE_LOG - (shares[w] > 1 ? highest_bit((uint32_t)shares[w] - 1) : 0);
        coder->bits[w] = (most << 16) - ((uint32_t)shares[w] << most);
        coder->first_state[w] = starts[w] - shares[w];
    }
    for (int state = 0; state < FSE_STATES; state++)
        coder->next[starts[spread[state]]++] = (uint16_t)(FSE_STATES + state);
}

static uint32_t first_state(const WeightCoder *coder, uint8_t weight)
{
    uint32_t bits = (coder->bits[weight] + (1 << 15)) >> 16;
    return coder->next[(int)(((bits << 16) - coder->bits[weight]) >> bits) + coder->first_state[weight]];
}

static uint32_t put_weight(const WeightCoder *coder, BitWriter *writer, uint32_t state, uint8_t weight)
{
    uint32_t bits = (state + coder->bits[weight]) >> 16;
    put_bits(writer, state & ((1u << bits) - 1), bits);
    return coder->next[(int)(state >> bits) + coder->first_state[weight]];
}

/* The weights as an FSE stream (RFC 8878, 4.2.1.2); returns its size, 0 if they cannot be one. */
static size_t encode_weights(const uint8_t *weights, size_t count, uint8_t *to)
{
    int shares[WEIGHTS];
    if (count < 3 || !share_states(weights, count, shares))
        return 0;
    WeightCoder coder;
    BitWriter writer = {0, 0, to};
    put_shares(&writer, shares);
    writer = (BitWriter){0, 0, end_bits(&writer)};
    make_weight_coder(&coder, shares);
    uint32_t states[2]; /* by whether the number of a weight is odd */
    size_t i = count - 1;
    states[i & 1] = first_state(&coder, weights[i]);
    i--;
    states[i & 1] = first_state(&coder, weights[i]);
    while (i-- > 0)
        states[i & 1] = put_weight(&coder, &writer, states[i & 1], weights[i]);
    put_bits(&writer, states[1] - FSE_STATES, FSE_LOG);
    put_bits(&writer, states[0] - FSE_STATES, FSE_LOG);
    put_bits(&writer, 1, 1);
    return (size_t)(end_bits(&writer) - to);
}

size_t describe_code(const uint8_t lengths[256], unsigned longest, uint8_t *to)
{
    uint8_t weights[256], coded[512];
    size_t last = 255, size;
    while (!lengths[last])
        last--;
    for (size_t i = 0; i <= last; i++)
        weights[i] = lengths[i] ? (uint8_t)(longest + 1 - lengths[i]) : 0;
    size = encode_weights(weights, last, coded); /* the weight of the last one follows from the others */
    if (size && size < 128 && (last > 128 || size < (last + 1) / 2)) {
        to[0] = (uint8_t)size;
        memcpy(to + 1, coded, size);
        return 1 + size;
    }
    if (last > 128)
        return 0;
    weights[last] = 0;
    to[0] = (uint8_t)(127 + last);
    for (size_t i = 0; i < last; i += 2)
        to[1 + i / 2] = (uint8_t)(weights[i] << 4 | weights[i + 1]);
    return 1 + (last + 1) / 2;
}
