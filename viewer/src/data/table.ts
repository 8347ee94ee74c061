// Columns of rows that grow: trajectories by seq, metrics by step. A row that comes again replaces the earlier one.
import type { Column, Columnar, Num } from "./types";

export class GrowingTable {
  readonly columns = new Map<string, Column>();
  length = 0;
  /** How often rows were taken in: whoever keeps what was made of them makes it anew when this has changed. */
  merged = 0;
  private readonly at = new Map<number, number>();

  constructor(private readonly key: string) {}

  /** Takes rows in: new ones at the end, known ones in their place. Columns that some rows lack hold null there. */
  merge(part: Columnar): void {
    this.merged++;
    if (part.reset) this.clear();
    const keys = part.columns[this.key] ?? [];
    const places = keys.map((value) => this.place(Number(value)));
    for (const [name, values] of Object.entries(part.columns)) this.write(name, values, places);
    for (const [name, values] of Object.entries(part.components ?? {})) this.write(`reward/${name}`, values, places);
    for (const column of this.columns.values()) while (column.length < this.length) column.push(null);
  }

  clear(): void {
    this.columns.clear();
    this.at.clear();
    this.length = 0;
  }

  column(name: string): Column {
    return this.columns.get(name) ?? [];
  }

  value(name: string, row: number): number | string | null {
    return this.columns.get(name)?.[row] ?? null;
  }

  number(name: string, row: number): Num {
    const value = this.value(name, row);
    return typeof value === "number" ? value : null;
  }

  text(name: string, row: number): string {
    const value = this.value(name, row);
    return value === null ? "" : String(value);
  }

  /** Index of the row with this key, or -1. */
  row(key: number): number {
    return this.at.get(key) ?? -1;
  }

  private place(key: number): number {
    const known = this.at.get(key);
    if (known !== undefined) return known;
    this.at.set(key, this.length);
    return this.length++;
  }

  private write(name: string, values: Column, places: number[]): void {
    let column = this.columns.get(name);
    if (!column) this.columns.set(name, (column = []));
    for (let i = 0; i < values.length; i++) {
      const place = places[i];
      if (place === undefined) continue;
      while (column.length < place) column.push(null);
      column[place] = values[i] ?? null;
    }
  }
}

/** Rows in order of a numeric column; rows of metrics can come out of order after a restart. */
export function orderBy(table: GrowingTable, name: string): number[] {
  const values = table.column(name);
  const order = Array.from({ length: table.length }, (_, row) => row);
  return order.sort((a, b) => Number(values[a] ?? 0) - Number(values[b] ?? 0));
}
