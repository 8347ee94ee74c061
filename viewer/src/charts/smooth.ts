// Curves made of others: smoothed, stacked, of several seeds.
import type { Num } from "../data/types";

/** Exponential moving average with debiasing, as TensorBoard smooths; gaps stay gaps. */
export function smooth(values: Num[], weight: number): Num[] {
  let [average, debias] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    average = average * weight + (1 - weight) * value;
    debias = debias * weight + (1 - weight);
    return average / debias;
  });
}

/** Sums of the first, the first two, … series, for areas on top of one another. */
export function stacked(series: Num[][]): Num[][] {
  const length = Math.max(0, ...series.map((one) => one.length));
  const sums = new Array<number>(length).fill(0);
  return series.map((one) => sums.map((_, index) => (sums[index] = sums[index]! + (one[index] ?? 0))));
}

export interface Band {
  x: number[];
  mean: Num[];
  low: Num[];
  high: Num[];
}

/** Mean and standard deviation around it over curves of several seeds, at each x where any has a value. */
export function band(curves: { x: number[]; y: Num[] }[]): Band {
  const at = new Map<number, number[]>();
  for (const { x, y } of curves) {
    x.forEach((place, index) => {
      const value = y[index];
      if (value === null || value === undefined) return;
      const there = at.get(place);
      if (there) there.push(value);
      else at.set(place, [value]);
    });
  }
  const out: Band = { x: [...at.keys()].sort((a, b) => a - b), mean: [], low: [], high: [] };
  for (const place of out.x) {
    const values = at.get(place)!;
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const deviation = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / values.length);
    out.mean.push(mean);
    out.low.push(mean - deviation);
    out.high.push(mean + deviation);
  }
  return out;
}
