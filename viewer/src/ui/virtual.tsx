// A table of any number of rows that draws only those in sight: a real <table>, with spacers above and below.
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

export interface ColumnOf {
  name: string;
  title: string;
  /** CSS width. */
  width: string;
  align?: "right";
  sortable?: boolean;
  /** What the column holds, for those who point at its title. */
  help?: string;
  cell: (row: number) => ComponentChildren;
}

interface Properties {
  label: string;
  columns: ColumnOf[];
  rows: number[];
  /** Stable key of a row: its seq. */
  rowKey: (row: number) => number;
  sorted: { column: string; descending: boolean };
  onSort: (column: string) => void;
  /** Key of the row that the keyboard is at. */
  at: number | null;
  onOpen: (row: number) => void;
}

const ROW = 30; // CSS pixels, as in the style sheet
const SPARE = 8;

export function VirtualTable(properties: Properties) {
  const { columns, rows, at } = properties;
  const scroller = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  useLayoutEffect(() => {
    const element = scroller.current!;
    const measure = () => setView({ top: element.scrollTop, height: element.clientHeight });
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    element.addEventListener("scroll", measure, { passive: true });
    return () => (observer.disconnect(), element.removeEventListener("scroll", measure));
  }, []);
  const place = at === null ? -1 : rows.findIndex((row) => properties.rowKey(row) === at);
  useEffect(() => {
    const element = scroller.current!;
    if (place < 0) return;
    const head = ROW + 4;
    const top = place * ROW;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top + ROW > element.scrollTop + element.clientHeight - head) element.scrollTop = top + ROW - element.clientHeight + head;
  }, [place]);
  const first = Math.max(0, Math.min(Math.floor(view.top / ROW), rows.length - 1) - SPARE);
  const last = Math.min(rows.length, Math.ceil((view.top + view.height) / ROW) + SPARE);
  return (
    <div class="virtual" ref={scroller} tabIndex={0} role="region" aria-label={properties.label}>
      <table aria-rowcount={rows.length + 1} aria-label={properties.label} style={{ minWidth: `${columns.reduce((sum, column) => sum + parseInt(column.width), 0)}px` }}>
        <colgroup>
          {columns.map((column) => (
            <col key={column.name} style={{ width: column.width }} />
          ))}
          <col />
        </colgroup>
        <Head {...properties} />
        <tbody>
          {first > 0 && <tr class="spacer" style={{ height: `${first * ROW}px` }} aria-hidden="true" />}
          {rows.slice(first, last).map((row, index) => (
            <Row key={properties.rowKey(row)} row={row} index={first + index} {...properties} />
          ))}
          {last < rows.length && <tr class="spacer" style={{ height: `${(rows.length - last) * ROW}px` }} aria-hidden="true" />}
        </tbody>
      </table>
    </div>
  );
}

function Head({ columns, sorted, onSort }: Properties) {
  return (
    <thead>
      <tr aria-rowindex={1}>
        {columns.map(({ name, title, align, sortable, help }) => {
          const here = sorted.column === name;
          return (
            <th key={name} scope="col" class={align} aria-sort={here ? (sorted.descending ? "descending" : "ascending") : undefined} title={help}>
              {sortable === false ? (
                title
              ) : (
                <button type="button" onClick={() => onSort(name)}>
                  {title}
                  <span aria-hidden="true" class="arrow">
                    {here ? (sorted.descending ? "↓" : "↑") : ""}
                  </span>
                </button>
              )}
            </th>
          );
        })}
        <td aria-hidden="true" />
      </tr>
    </thead>
  );
}

function Row(properties: Properties & { row: number; index: number }) {
  const { columns, row, index, at, rowKey, onOpen } = properties;
  return (
    <tr
      aria-rowindex={index + 2}
      class={rowKey(row) === at ? "at" : ""}
      onClick={(event) => !(event.target as HTMLElement).closest("a, button, input") && onOpen(row)}
    >
      {columns.map((column, position) =>
        position === 0 ? (
          <th key={column.name} scope="row" class={column.align}>
            {column.cell(row)}
          </th>
        ) : (
          <td key={column.name} class={column.align}>
            {column.cell(row)}
          </td>
        ),
      )}
      <td aria-hidden="true" />
    </tr>
  );
}
